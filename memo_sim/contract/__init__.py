"""What files say: units, errors and the typed, versioned documents that memo-sim and memo-exec exchange."""
