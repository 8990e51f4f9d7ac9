"""Write files and folders atomically, and read files as untrusted."""
