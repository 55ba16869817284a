"""hoist chat at a terminal of 40 columns: several lines that come at once are one message, a line that
the terminal cuts is refused, what a long message takes is shown.   tests/terminal.py HOIST MODEL"""
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time

pid, fd = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], [sys.argv[1], 'chat', sys.argv[2], '--temp', '0', '-n', '1'])
fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 40, 0, 0))
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
put((b'a long word ' * 8 + b'\n') * 120)
until(b'Enter sends', 2)
put(b'\n')
until(b'(length)', 3)
put(b'\x04')
try:
    until(b'never')
except OSError:
    pass
_, status = os.waitpid(pid, 0)
answers = seen.count(b'(length)')
shown = re.findall(rb'\r(reading prompt: \d+ of \d+ tokens *)\r', seen)
good = status == 0 and answers == 3 and shown and all(len(x) < 40 for x in shown) and seen.endswith(b'> \r\n')
print('hoist chat: ok' if good else f'hoist chat: status {status}, {answers} answers, {shown[-1:]}, {seen[-20:]}')
