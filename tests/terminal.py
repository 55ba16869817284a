"""hoist chat at a terminal: several lines that come at once are one message, and a line that the
terminal cuts is refused.   tests/terminal.py HOIST MODEL"""
import os
import pty
import sys
import time

pid, fd = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], [sys.argv[1], 'chat', sys.argv[2], '--temp', '0', '-n', '1'])
seen = b''


def until(text, n=1):
    """Reads on until text was seen n times."""
    global seen
    while seen.count(text) < n:
        seen += os.read(fd, 65536)


def put(data):
    while data:
        data = data[os.write(fd, data[:1000]):]
        time.sleep(0.005)   # the terminal's buffer is small


until(b'> ')
put(b'one\ntwo\nthr')
until(b'Enter sends')
put(b'ee\n')
until(b'(length)')
put(b'four\n')
until(b'(length)', 2)
put(b'x' * 5000 + b'\n')
until(b'4095 bytes')
put(b'/quit\n')
try:
    until(b'never')
except OSError:
    pass
_, status = os.waitpid(pid, 0)
answers = seen.count(b'(length)')
print('hoist chat: ok' if status == 0 and answers == 2 else f'hoist chat: status {status}, {answers} answers')
