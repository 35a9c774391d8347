"""Weight layouts as pure torch functions, each with its inverse."""
