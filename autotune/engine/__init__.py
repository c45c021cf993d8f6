"""Run whole searches where the devices are: in a process of this machine, or on a node of a Ray cluster."""
