"""Pages for people, and the program that draws one of their pictures."""
