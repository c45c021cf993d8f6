"""Write a study as a self-contained HTML page: page, style, markup and charts."""
