"""What is wrong with an object, an example, a message or a recipe: nothing here changes anything."""
