"""Write files and folders whole or not at all, and read them as untrusted."""
