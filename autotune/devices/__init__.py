"""Read facts about the GPUs and the CPU of this machine, without torch: ``nvml``, ``host``, ``listing``."""
