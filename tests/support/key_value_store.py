"""A store of torch.distributed for the heartbeats of one process."""

from __future__ import annotations

import threading

import torch.distributed as dist


class Store:
    """In memory, shared by the heartbeats of a test."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.broken, self.hangs = False, threading.Event()
        self.hangs.set()

    def set(self, key: str, value: str) -> None:
        self.hangs.wait()
        if self.broken:
            raise dist.DistNetworkError("no store")
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.values.setdefault(key, value.encode())
