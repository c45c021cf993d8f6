"""Build, run and measure one trial."""
