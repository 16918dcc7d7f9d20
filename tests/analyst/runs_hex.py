"""Run the code that its word holds in hexadecimal: a line that a shell shows then holds nothing of what the code prints."""

import sys

exec(bytes.fromhex(sys.argv[1]).decode())
