"""Run a search's trials on the nodes of a cluster: the side that searches, and the side that has the GPUs."""
