import json
import sys
import urllib.error
import urllib.request


def ask(prompt, **kw):
    body = json.dumps(dict(model="m", prompt=prompt, max_tokens=4, ignore_eos=True, **kw)).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


status, text = ask("much too long " * 100)
print("refused:", status, text[:300], file=sys.stderr)
again, _ = ask("short")
if (status, again) != (400, 200):
    sys.exit(f"unexpected answers {status} {again}")
print("HEALTHY50-DONE", status, again)
