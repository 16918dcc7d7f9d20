"""A server for benchmarks: asyncio alone, some work for each request, a line of log, and a connection that stays open.

python http_server.py PORT
"""

import asyncio
import hashlib
import sys

WORK = b"x" * 400_000  # hashed for each request: near a millisecond of one core
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: "


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while (line := await reader.readline()).strip():
        while (await reader.readline()).strip():
            pass
        body = hashlib.sha256(WORK).hexdigest().encode()
        writer.write(HEAD + str(len(body)).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        print(f'INFO:     127.0.0.1 - "{line.decode().strip()}" 200 OK', flush=True)
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[1]))
    print("READY", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
