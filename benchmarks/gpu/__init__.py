"""What `benchmarks/gpu.sh` measures."""
