"""Gives the kernel of an engine a control thread, where ipyparallel makes none: before version 9.

Control requests are then answered while the main thread runs a cell; else no cell could be interrupted or aborted, and
no view could ask anything until the cell ends.
"""

from __future__ import annotations

from typing import Any

from axon_nb.records.hooks import hook, missing_hooks


def install_control_thread() -> None:
    """Have the engine that this process is about to run use a kernel with a control thread."""
    if not hook("kernel.control_thread").is_used or missing_hooks("kernel.control_thread"):
        return
    import ipyparallel.engine.app
    from ipykernel.control import ControlThread
    from ipyparallel.engine.kernel import IPythonParallelKernel
    from zmq.eventloop.zmqstream import ZMQStream

    class ThreadedKernel(IPythonParallelKernel):
        control_stream: Any
        control_thread: Any

        def start(self) -> None:
            stream = self.control_stream
            self.control_thread = ControlThread(daemon=True)
            self.control_thread.start()
            socket, stream.socket = stream.socket, None
            stream.io_loop.remove_handler(socket)
            self.control_stream = ZMQStream(socket, self.control_thread.io_loop)
            super().start()

    engine: Any = ipyparallel.engine.app
    engine.Kernel = ThreadedKernel
