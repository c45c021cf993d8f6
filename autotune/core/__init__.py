"""Values that every other package uses. Only the standard library is imported here."""
