"""Generated documentation: technique pages, catalog, support matrix, architecture."""
