"""Files and folders: written whole or not at all, and read as what a stranger may have made."""
