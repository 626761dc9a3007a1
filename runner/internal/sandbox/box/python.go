package box

import _ "embed"

// bootstrap runs the source on descriptor 3 as __main__.
//
//go:embed bootstrap.py
var bootstrap string
