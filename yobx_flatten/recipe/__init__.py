"""How a class is flattened and rebuilt: plain data, known to no library."""
