package store

import (
	"context"
	"net"
	"time"
)

// patient dials connections that give up when the server says nothing for
// limit. To watch a context instead costs two goroutines for each statement.
type patient struct{ limit time.Duration }

// Dial implements pq.Dialer, as the next one does.
func (p patient) Dial(network, address string) (net.Conn, error) {
	return p.DialTimeout(network, address, p.limit)
}

// DialTimeout dials with a bound of its own.
func (p patient) DialTimeout(network, address string, bound time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	return p.DialContext(ctx, network, address)
}

// DialContext implements pq.DialerContext.
func (p patient) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return patientConn{c, p.limit}, nil
}

type patientConn struct {
	net.Conn
	limit time.Duration
}

func (c patientConn) Read(b []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.limit)); err != nil {
		return 0, err
	}
	return c.Conn.Read(b)
}

func (c patientConn) Write(b []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.limit)); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}
