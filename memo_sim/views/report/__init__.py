"""Reports as one HTML file each: documents in, a page out that opens without a network.

``page`` holds the blocks of any page and writes the file; ``what_if``, ``run`` and ``validation`` make the pages of
their documents from those blocks. ``timeline.js`` draws the timeline from the columns that ``packed`` compresses.
"""
