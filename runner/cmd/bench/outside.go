package main

import (
	"errors"
	"io"
	"net"
	"strings"
	"sync"

	"github.com/miekg/dns"
)

// What sandboxes reach when the network is measured: a name and its address.
const (
	outsideName    = "outside.test"
	outsideAddress = "127.0.0.2"
)

// outside is a server beyond the sandboxes and the DNS server that names it.
type outside struct {
	tcp     net.Listener
	dns     *dns.Server
	serving sync.WaitGroup
}

func listenOutside() (*outside, error) {
	tcp, err := net.Listen("tcp", outsideAddress+":0")
	if err != nil {
		return nil, err
	}
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(err, tcp.Close())
	}
	up := make(chan struct{})
	o := &outside{tcp: tcp, dns: &dns.Server{PacketConn: udp, Handler: dns.HandlerFunc(answer), NotifyStartedFunc: func() { close(up) }}}
	o.serving.Go(func() { _ = o.dns.ActivateAndServe() }) // ends at Shutdown
	<-up
	o.serving.Go(o.accept)
	return o, nil
}

func (o *outside) port() int        { return o.tcp.Addr().(*net.TCPAddr).Port }
func (o *outside) resolver() string { return o.dns.PacketConn.LocalAddr().String() }

func (o *outside) close() {
	_ = o.tcp.Close()
	_ = o.dns.Shutdown()
	o.serving.Wait()
}

func (o *outside) accept() {
	for {
		c, err := o.tcp.Accept()
		if err != nil {
			return
		}
		o.serving.Go(func() { serve(c) })
	}
}

// serve sends a byte to who asks with a 1, and the whole download to others.
func serve(c net.Conn) {
	defer c.Close()
	var ask [1]byte
	if _, err := io.ReadFull(c, ask[:]); err != nil {
		return
	}
	if ask[0] == '1' {
		_, _ = c.Write(ask[:])
		return
	}
	chunk := make([]byte, 1<<20)
	for range download / len(chunk) {
		if _, err := c.Write(chunk); err != nil {
			return
		}
	}
}

func answer(w dns.ResponseWriter, q *dns.Msg) {
	reply := new(dns.Msg).SetReply(q)
	if len(q.Question) == 1 && q.Question[0].Qtype == dns.TypeA && strings.EqualFold(q.Question[0].Name, outsideName+".") {
		reply.Answer = append(reply.Answer, &dns.A{
			Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60},
			A:   net.ParseIP(outsideAddress),
		})
	}
	_ = w.WriteMsg(reply)
}
