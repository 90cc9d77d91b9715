"""What ranks print while no cell runs is shown at the head of the next cell."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.kernel import Kernel
from tests.support.processes import until

HEAD = "Since the last cell:"


def shown_between(kernel: Kernel, cell: str, num_lines: int) -> list[str]:
    """Run a cell until it has shown so many lines as earlier; return them, sorted."""
    found: list[str] = []

    def all_found() -> bool:
        _, _, rest = kernel.ok(cell).stdout.partition(f"{HEAD}\n")
        found.extend(line for line in rest.splitlines() if line.startswith("  "))
        return len(found) >= num_lines

    assert until(all_found), found
    return sorted(found)


def test_child_process_that_outlives_its_cell(kernel: Kernel, tmp_path: Path) -> None:
    go, done = tmp_path / "go", tmp_path / "done"
    kernel.ok(
        "%%rank 1\nimport subprocess\n_ = subprocess.Popen(['sh', '-c', "
        f"'while [ ! -e {go} ]; do sleep .05; done; for i in 0 1 2; do echo tick $i; done; touch {done}'])"
    )
    go.touch()
    until(done.exists)
    time.sleep(0.5)  # the rank reads what children print every 0.2 s
    ticks = [f"  [rank 1] tick {i}" for i in range(3)]
    assert shown_between(kernel, "%%rank 1\nprint('own')", len(ticks)) == ticks
    assert kernel.ok("%%rank 1\nprint('own')").lines() == ["[rank 1] own"]


def test_threads_and_timers(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(
        "%%distributed\nimport pathlib, threading\n"
        "def speak(text, number):\n"
        "    print(text, rank, flush=True)\n"
        f"    pathlib.Path({str(tmp_path)!r}, text + str(rank)).touch()\n"
        "threading.Timer(0.5, speak, ['timer', 1]).start()"
    )
    until(lambda: len(list(tmp_path.iterdir())) == 4)
    assert kernel.ok("%%distributed --quiet\nprint('nothing is shown by a quiet cell')").stdout == ""
    assert shown_between(kernel, "%%rank 0\n5", 4) == [f"  [rank {rank}] timer {rank}" for rank in range(4)]


def test_thread_of_an_earlier_cell_prints_into_the_running_cell(kernel: Kernel) -> None:
    kernel.ok(
        "%%rank 2\nimport threading\nspeak = threading.Event()\n"
        "thread = threading.Thread(target=lambda: (speak.wait(60), print('from the thread')))\nthread.start()"
    )
    assert kernel.ok("%%rank 2\nspeak.set(); thread.join()").lines() == ["[rank 2] from the thread"]


def test_much_output_is_bounded(kernel: Kernel, tmp_path: Path) -> None:
    done = tmp_path / "done"
    kernel.ok(
        "%%rank 3\nimport subprocess\n"
        f"_ = subprocess.Popen(['sh', '-c', 'sleep .3; yes | head -c 20000000; touch {done}'])"
    )
    until(done.exists)
    until(lambda: "omitted" in kernel.ok("%%rank 3\nprint('own')").stdout)
