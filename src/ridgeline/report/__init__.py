"""Results as tables, pictures and one self-contained HTML file. No torch; plotly only to copy its script."""
