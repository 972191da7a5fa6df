"""python -m tests.bench: the benchmarks."""

from tests.bench import chunked_loss, flash, formats, memory, recompute, scale, sharding

if __name__ == "__main__":
    sharding.main()
    memory.main()
    recompute.main()
    chunked_loss.main()
    flash.main()
    formats.main()
    scale.main()
