"""A child that speaks the frame protocol: answers pings, and does what its commands say."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

import psutil

from sealring.node.wire.frames import FrameSocket
from sealring.v1 import engine_pb2

parser = argparse.ArgumentParser()
parser.add_argument("--control-fd", type=int, required=True)
parser.add_argument("--stubborn", action="store_true")
arguments = parser.parse_args()
if arguments.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
frames = FrameSocket(socket.socket(fileno=arguments.control_fd))
frames.send(engine_pb2.EngineEvent(ready=engine_pb2.EngineReady(memory_limit=psutil.Process().num_fds())))
while (command := frames.receive(engine_pb2.EngineCommand)) is not None:
    kind = command.WhichOneof("command")
    if kind == "ping":
        frames.send(engine_pb2.EngineEvent(pong=engine_pb2.EnginePong(sequence=command.ping.sequence)))
    elif kind == "shutdown":
        sys.exit(0)
    elif kind == "profile":
        what = command.profile.path
        if what == "log":
            sys.stderr.write('{"event": "hello there", "level": "warning", "prompt": "the secret"}\n')
            sys.stderr.write(
                '{"event": "broke", "level": "error", "error": "KeyError", "exception": ["KeyError",'
            )
            sys.stderr.write(
                ' "  /x/y.py:3 main", "the secret", 5]}\n'
                '{"event": "odd", "error": "EPOCH_ENDED: the secret: x"}\n'
            )
            sys.stderr.write("the secret in plain words\n")
            sys.stderr.write('Traceback (most recent call last):\n  File "x.py", line 3, in main\n')
            sys.stderr.write("ValueError: the secret again\n")
            sys.stderr.write("[ring] connecting to 127.0.0.1\n")
            sys.stderr.write("x" * 100_000 + "\n")
            sys.stderr.flush()
        elif what == "crash":
            os._exit(3)
        elif what == "garbage":
            frames.socket.sendall(b"\xff\xff\xff\xff")
            time.sleep(60)
        elif what == "grandchild":
            process = subprocess.Popen(["sleep", "60"])
            event = engine_pb2.StageLoaded(weight_bytes=process.pid)
            frames.send(engine_pb2.EngineEvent(loaded=event))
if arguments.stubborn:
    time.sleep(60)
