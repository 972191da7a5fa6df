"""python -m tests.bench: the benchmarks."""

from tests.bench import formats, memory, recompute, sharding

if __name__ == "__main__":
    sharding.main()
    memory.main()
    recompute.main()
    formats.main()
