"""Process groups, collectives and exchanges as the program names them."""
