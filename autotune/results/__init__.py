"""Present a study to its readers: report, text, JSON document, HTML page, plot, export, dashboard."""
