"""Load on a server with the OpenAI API: latencies from intended send times, goodput, errors."""
