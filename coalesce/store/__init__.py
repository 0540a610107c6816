"""The run folder: its file names, its tables, who writes them and who reads them."""
