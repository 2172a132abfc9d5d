"""The suite on every supported Python, on the oldest PyTorch, and beside optional packages: ``make test-matrix``.

A machine without a GPU saves gigabytes where an index offers CPU builds: ``PIP_EXTRA_INDEX_URL`` reaches pip as usual.
Interpreters that are not installed are skipped, and said to be.
"""

import nox

nox.options.sessions = ["python", "oldest_torch"]
nox.options.error_on_missing_interpreters = False
OLDEST_TORCH = "2.11.0"


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
def python(session: nox.Session) -> None:
    """The whole suite with the newest releases of everything."""
    session.install(".[dev]")
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session(python="3.11")
def oldest_torch(session: nox.Session) -> None:
    """The whole suite with the oldest PyTorch that is supported."""
    # The interpreter of the Triton that this PyTorch requires fails with NumPy 2.4: its tests would be skipped.
    session.install(f"torch=={OLDEST_TORCH}", "numpy<2.4", ".[dev]")
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


CLIENTS = ("anthropic", "langchain-openai", "instructor", "litellm", "pydantic-ai-slim[openai]", "openai-agents",
           "llama-index-llms-openai-like llama-index-embeddings-openai-like", "aiperf")  # fmt: skip


@nox.session(python="3.11")
@nox.parametrize("client", CLIENTS)
def clients(session: nox.Session, client: str) -> None:
    """Client libraries beside our server, each with the ``openai`` package that it asks for."""
    session.install(".[dev]", *client.split())
    session.run("python", "-m", "pytest", "-rs", "tests/serve/test_client_libraries.py", *session.posargs)


@nox.session(python="3.11")
def peers(session: nox.Session) -> None:
    """The tests that need packages which ``dev`` leaves out."""
    session.install(
        "-c",
        "constraints.txt",
        ".[dev,deepspeed,ray,eval]",
        "bitsandbytes>=0.45",
        "kubernetes-validate>=1.34",
        "liger-kernel>=0.8",
        "torchao>=0.17",
    )
    session.run("python", "tests/peers.py", *(session.posargs or ["--json", "benchmarks/results/peers.json"]))
