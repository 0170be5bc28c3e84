"""This package draws pictures from rows of metrics: learning curves and the charts of a comparison."""
