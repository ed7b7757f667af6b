"""Train a model of any of the three families from a recipe: `accelerate launch -m training RECIPE.yaml --key value`."""

import os

# Of the process that started this one, asked before the imports that take seconds: a launcher may die in between.
PARENT = os.getppid()
