"""Pure protocol logic: no asyncio, no socket, no clock, no random source. `now` and random bytes are arguments."""
