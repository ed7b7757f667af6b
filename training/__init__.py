"""Train a model of any of the three families from a recipe: `accelerate launch -m training RECIPE.yaml --key value`."""
