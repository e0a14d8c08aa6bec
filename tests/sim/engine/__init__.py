"""Say here what this folder holds."""
