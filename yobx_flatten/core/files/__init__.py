"""Write files and folders atomically, and read files without trusting their contents."""
