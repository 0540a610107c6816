"""Where jobs run: in this process, in one process per local device, on Slurm."""
