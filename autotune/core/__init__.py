"""Hold the values that every other package uses. Imports the standard library only."""
