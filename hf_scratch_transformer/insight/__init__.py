"""See inside a model: its sizes, its attention, its positions, its words, in numbers and in pictures."""
