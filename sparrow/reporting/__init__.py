"""Reports: results as pages, tables and figures, for browsers, Markdown and the terminal."""
