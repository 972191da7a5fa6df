"""python -m tests.bench: the benchmarks."""

from tests.bench import sharding

if __name__ == "__main__":
    sharding.main()
