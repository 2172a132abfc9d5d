"""Results as tables, pictures and one self-contained HTML file. No torch."""
