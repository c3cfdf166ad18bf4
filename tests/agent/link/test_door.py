"""Where an agent that leads a run accepts connections."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest
from tools.stack.server import free_port

from otel_ddp.agent.link.door import Door


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_door_that_is_closed_while_it_opens_leaves_no_port_taken(rounds: int) -> None:
    port = free_port()

    async def close_after(rounds: int) -> None:
        door = Door()
        opening = asyncio.ensure_future(door.listen(["127.0.0.1"], [port], cast(Any, object)))
        for _ in range(rounds):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        door.close()
        socket.create_server(("127.0.0.1", port)).close()

    asyncio.run(close_after(rounds))
