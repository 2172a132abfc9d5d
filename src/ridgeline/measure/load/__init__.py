"""Load on a server that speaks the OpenAI API, and what it gives: latencies from intended times, goodput, errors."""
