"""Reports: what was done, as text, pages, traces and ranges of profilers."""
