// This file is empty so that fork.go may declare functions that the runtime defines.
