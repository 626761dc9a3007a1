// Package e2e plays whole scenarios against the two built daemons, over HTTP
// only: on the personal tier (SQLite, NATS in process) and on the cluster
// tier's parts (PostgreSQL, a NATS server of its own).
package e2e
