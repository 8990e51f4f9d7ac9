"""What both packages stand on: objects as they are held, what a call changes, comparisons."""
